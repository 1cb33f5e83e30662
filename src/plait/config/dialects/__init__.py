"""Every name and file format that the schema's keys are also known by: DeepSpeed's, Megatron-LM's, Accelerate's."""
