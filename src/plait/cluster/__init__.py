"""The machines, who sits where, and the meshes over them."""
