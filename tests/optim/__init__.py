"""zeepo.optim: kernels, drop-in optimizers, and both under zeepo."""
