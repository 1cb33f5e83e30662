"""Keys of a configuration file under all their names: Plait's, DeepSpeed's and Megatron-LM's.

Configurations of other programs are refused. The error contains the command that converts them.
"""
