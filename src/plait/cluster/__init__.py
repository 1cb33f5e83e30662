"""The machines, the placement of ranks on them, and the meshes."""
