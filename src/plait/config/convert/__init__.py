"""Files of Accelerate, the Trainer's FSDP arguments and Megatron-LM's flags as configurations of
Plait.

`plait config convert` writes them as files, and `plait.hf.Trainer` reads
`TrainingArguments(fsdp=...)`. `load` refuses such files by name.
"""
