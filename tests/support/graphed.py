"""torch_native with a plan that replays refill, so that graphs are tested without a GPU."""

from attn_core.backends.torch_native.backend import TorchNative


class Graphed(TorchNative):
    """Keeps the plan of a capture in one dict, which every later replay of it goes on reading."""

    def init_forward_metadata_capture_cuda_graph(self, batch):
        return dict(self.init_forward_metadata(batch))

    def init_forward_metadata_replay_cuda_graph(self, batch, metadata):
        metadata.update(self.init_forward_metadata(batch))
