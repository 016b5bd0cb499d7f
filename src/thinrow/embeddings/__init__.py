"""Dynamic embedding tables: 64-bit keys, growth without copying, sparse optimizers fused with the gradient."""
