"""Wave 3.9.1 for the CPU: its templates make kernels that run in float32."""
