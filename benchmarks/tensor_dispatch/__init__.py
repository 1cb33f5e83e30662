"""Host time of a tensor-parallel block, Plait beside torch's own styles."""
