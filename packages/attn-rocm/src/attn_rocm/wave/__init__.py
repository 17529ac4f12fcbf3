"""Wave, kernels that are compiled per shape of a layer."""
