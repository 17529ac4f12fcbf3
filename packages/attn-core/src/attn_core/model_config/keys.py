"""Typed access to the keys of a config; errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attn_core.errors import ModelConfigError

# Our name → the names in the field, in order; a dot steps into a nested object.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "encoder_heads": ("encoder_attention_heads", "num_attention_heads", "num_heads"),
    "decoder_heads": ("decoder_attention_heads", "num_attention_heads", "num_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "attn_config.kv_n_heads",
        "num_attention_groups",
    ),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "head_dim": ("head_dim", "d_kv", "attention_head_dim", "kv_channels"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "layer_types": ("layer_types", "layers_block_type"),
    "sliding_window": (
        "sliding_window",
        "sliding_window_size",
        "efficient_attention_config.swa.window_size",
    ),
    "sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
    "attn_logit_softcapping": ("attn_logit_softcapping", "attn_logit_softcap"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "model_max_length",
        "n_positions",
        "max_target_positions",
        "max_seq_len",
        "n_ctx",
        "seq_length",
    ),
    "linear_num_key_heads": (
        "linear_num_key_heads",
        "linear_attn_config.num_heads",
        "linear_num_heads",
        "efficient_attention_config.jet.num_heads",
    ),
    "linear_key_head_dim": (
        "linear_key_head_dim",
        "linear_attn_config.head_dim",
        "linear_head_dim",
        "efficient_attention_config.jet.head_dim",
    ),
    "linear_conv_kernel_dim": (
        "linear_conv_kernel_dim",
        "linear_attn_config.short_conv_kernel_size",
    ),
    "linear_value_expansion": ("efficient_attention_config.jet.expand_v",),
    "vision_heads": ("num_heads", "num_attention_heads", "attention_heads"),
    "vision_width": ("embed_dim", "hidden_size", "width"),  # embed_dim: Qwen2-VL's own width
}

LIMIT = 2**31  # above any true size: a larger number is a broken config
MAX_LAYERS = 10_000
MOST: Mapping[str, int] = dict.fromkeys(
    (
        "num_hidden_layers",
        "sliding_window_pattern",
        "full_attention_interval",
        "no_rope_layer_interval",
        "index_topk_freq",
    ),
    MAX_LAYERS,
)


def lookup(config: Mapping[str, object], path: str) -> tuple[bool, object]:
    """Say whether a dotted path is in `config`, and its value."""
    value: object = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def brief(value: object) -> str:
    """Show a value of a config in at most 40 characters."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "no text"
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass(frozen=True)
class Keys:
    """The keys of one config or sub-config.

    owner names the model in messages. defaults stand for keys that are absent (a null counts as
    present). notes collects what was assumed while reading, seen the paths that were looked up.
    """

    config: Mapping[str, object]
    owner: str
    model_type: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    defaulted: dict[str, object] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def assume(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def get(self, name: str) -> object:
        """Return the value of a key, a default of the family, or None."""
        paths = ALIASES.get(name, (name,))
        self.seen.update(paths)
        hits = [lookup(self.config, path) for path in paths]
        values = [value for is_set, value in hits if is_set]
        if values:
            return next((v for v in values if v is not None), None)
        if name in self.defaults:
            self.defaulted[name] = self.defaults[name]
        return self.defaults.get(name)

    def count(self, name: str) -> int | None:
        """Return a positive integer, or None where the key is absent or null."""
        value = self.get(name)
        if value is None:
            return None
        maximum = MOST.get(name, LIMIT - 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= maximum:
            limit = f", at most {maximum}" if name in MOST else ""
            raise self._wrong(name, value, f"a positive integer{limit}")
        return value

    def layers(self, name: str) -> list[object] | None:
        """Return a list with one entry per layer, or None where the key is absent or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise ModelConfigError(f"the config of {self.owner} has {name} that are no list")
        if len(value) > MAX_LAYERS:
            raise ModelConfigError(
                f"the config of {self.owner} has {name} of {len(value)} layers (at most "
                f"{MAX_LAYERS})"
            )
        return value

    def number(self, name: str) -> float | None:
        """Return a positive number, or None where the key is absent, null or zero."""
        value = self.get(name)
        if value is None or value == 0:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LIMIT:
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def need(self, *names: str) -> tuple[int, ...]:
        """Return positive integers; raise ModelConfigError that lists every missing key."""
        values = [self.count(name) for name in names]
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        if missing:
            spelled = "; ".join(" or ".join(ALIASES.get(name, (name,))) for name in missing)
            raise ModelConfigError(
                f"the config of {self.owner} does not say: {spelled}. Add the keys to config.json, "
                "or give the shapes yourself (--kind, --head-dim, --num-q-heads, --num-kv-heads)"
            )
        return tuple(value for value in values if value is not None)

    def _wrong(self, name: str, value: object, expected: str) -> ModelConfigError:
        text = brief(value)
        names = ALIASES.get(name, (name,))
        key = next((alias for alias in names if lookup(self.config, alias)[0]), name)
        return ModelConfigError(
            f"the config of {self.owner} has {key} = {text} (expected {expected})"
        )
