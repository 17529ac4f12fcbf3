"""The part of flash_attn.cute.utils that a caller may use: a soft cap as a score mod."""


def create_softcap_scoremod(softcap_val):
    def scoremod_premask_fn(
        acc_S_SSA, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors
    ):
        raise AssertionError("compiled into the kernel, never called")

    scoremod_premask_fn.softcap_val = softcap_val  # for the emulated kernel
    return scoremod_premask_fn
