"""intel_amx: our own attention kernels in C for x86 CPUs, with AVX2, AVX-512 or AMX."""
