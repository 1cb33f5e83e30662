"""Conversion of Accelerate's files, the Trainer's FSDP arguments and Megatron-LM's flags.

`plait config convert` writes the result as a file, and `plait.hf.Trainer` reads
`TrainingArguments(fsdp=...)`. `load` refuses such configurations.
"""
