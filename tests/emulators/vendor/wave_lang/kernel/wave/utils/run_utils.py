"""The machine that a kernel is compiled for."""


def set_default_run_config(options):
    options.device, options.target = "hip", "gfx942"
    return options
