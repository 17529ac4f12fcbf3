"""The types of the names that attn_core hands on lazily; __init__.py imports them on first use."""

from attn_core.allocator import PageAllocator as PageAllocator
from attn_core.backend import AttentionBackend as AttentionBackend
from attn_core.backend import BackendConfig as BackendConfig
from attn_core.backend import LinearAttentionBackend as LinearAttentionBackend
from attn_core.backend import create_backend as create_backend
from attn_core.capabilities import TREES as TREES
from attn_core.capabilities import BackendSpec as BackendSpec
from attn_core.capabilities import Capabilities as Capabilities
from attn_core.capabilities import Device as Device
from attn_core.capabilities import Kind as Kind
from attn_core.capabilities import LayerNeeds as LayerNeeds
from attn_core.capabilities import Phase as Phase
from attn_core.capabilities import Requirements as Requirements
from attn_core.capabilities import Speculation as Speculation
from attn_core.decision import Overrides as Overrides
from attn_core.decision import Selection as Selection
from attn_core.decision import Verdict as Verdict
from attn_core.device import parse_device as parse_device
from attn_core.device import probe_device as probe_device
from attn_core.dispatcher import HybridDispatcher as HybridDispatcher
from attn_core.forward import AttentionLayer as AttentionLayer
from attn_core.forward import CacheView as CacheView
from attn_core.forward import ForwardBatch as ForwardBatch
from attn_core.forward import ForwardMode as ForwardMode
from attn_core.forward import SpecInfo as SpecInfo
from attn_core.hookspecs import hookimpl as hookimpl
from attn_core.kv_cache import KVPool as KVPool
from attn_core.kv_cache import LayerCache as LayerCache
from attn_core.kv_cache import StateCache as StateCache
from attn_core.kv_cache import StatePool as StatePool
from attn_core.models import context_length as context_length
from attn_core.models import read_config as read_config
from attn_core.models import requirements_from_config as requirements_from_config
from attn_core.plugins import Registry as Registry
from attn_core.plugins import load_plugins as load_plugins
from attn_core.selection import select as select
from attn_core.why_not import WhyNot as WhyNot

__version__: str
__all__: list[str]
