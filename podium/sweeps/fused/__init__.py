"""Many models in one: stacked parameters, fused layers and optimizers, rows that trials enter and leave."""
