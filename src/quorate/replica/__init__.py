"""A worker's copy of what is trained: model, optimizers, buffers, gradients, and the watch over them."""
