"""Keys of a configuration file under all their names: Plait's, DeepSpeed's and Megatron-LM's.

Configurations of other programs are recognised and refused with the command that converts them.
"""
