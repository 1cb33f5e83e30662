"""The largest Llama that one device trains: plain torch, Plait with offload, DeepSpeed ZeRO-Offload."""
