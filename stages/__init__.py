"""One function, one output directory. No Prefect here, and no megatron."""
