"""Other names of the schema's keys: all of DeepSpeed's, and Megatron-LM's names of sizes. Other
programs' files are recognised.
"""
