"""flashinfer.gdn_kernels.delta_rule_dsl 0.6.14: the prefill kernels."""
