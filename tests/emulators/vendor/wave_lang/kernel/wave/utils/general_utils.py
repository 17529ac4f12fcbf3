"""What every kernel's symbols are joined with."""


def get_default_scheduling_params():
    return {"READ_SHARED_DELAY": 1, "WRITE_SHARED_DELAY": 1}
