"""Pipeline parallelism: schedules, stages, and the runtime that executes them."""
