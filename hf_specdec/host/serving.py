"""transformers' server, tensor parallel models, and files of checkpoints, by folder or Hub repository."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from .parts import PARTS, lazy_part, named_in, part, uses

_SERVER = "transformers.cli.serving"
_UTILS, _APP = f"{_SERVER}.utils", f"{_SERVER}.server"
_TENSOR_PARALLEL = "transformers.distributed.tensor_parallel"

_HANDLER = "requests of the server are checked before its handle_request reads them"

is_serve_available = part(
    "transformers.utils.import_utils", "is_serve_available", why="tells whether the server's packages are installed"
)
server = lazy_part(_APP, why="module of the server")
utils = lazy_part(_UTILS, why="module of the server's managers")
command_line = lazy_part("transformers.cli.transformers", "app", why="starts the server")
lazy_part(_UTILS, "CBGenerateManager", why="replaced: managers with a drafter, settings of each request")
lazy_part(_UTILS, "CBWorkerDeadError", why="error of a manager that has ended")
lazy_part(_UTILS, "set_torch_seed", why="replaced: a seed is the request's own")
lazy_part(_UTILS, "split_model_id", why="name of the target")
lazy_part(_APP, "build_server", why="replaced: the manager is made before requests come")
# Names in the server's modules that are replaced or called.
SERVER_PARTS = [one for one in PARTS if one.where in (_UTILS, _APP) and one.names]

# Kinds of requests that are checked first, named as their handlers.
CHAT = named_in(f"{_SERVER}.chat_completion", "ChatCompletionHandler", why=_HANDLER, is_needed=False)
COMPLETION = named_in(f"{_SERVER}.completion", "CompletionHandler", why=_HANDLER, is_needed=False)
RESPONSE = named_in(f"{_SERVER}.response", "ResponseHandler", why=_HANDLER, is_needed=False)

# The method that starts a thread with each request, to unload an idle model; a server's own target stays loaded.
IDLE_TIMER = named_in(
    f"{_SERVER}.model_manager:TimedModel",
    "reset_timer",
    why="replaced: the server's target is never unloaded",
    is_needed=False,
)

# The function of transformers' middleware, which gives requests their ids.
REQUEST_ID_MIDDLEWARE = "request_id_middleware"

# The handlers' method that makes an event of a stream.
EVENT_BUILDER = named_in(
    f"{_SERVER}.chat_completion:{CHAT}",
    "_build_chunk_sse",
    why="replaced: events of a stream take less time",
    is_needed=False,
)

cached_file = part("transformers.utils.hub", "cached_file", why="downloads the files of a checkpoint")
extract_commit_hash = part("transformers.utils.hub", "extract_commit_hash", why="revision of a downloaded checkpoint")

# Functions that list the models of a server, newest first.
MODEL_LISTS = ("list_models", "get_gen_models")
lazy_part(f"{_SERVER}.model_manager:ModelManager", *MODEL_LISTS, why="replaced: adapters are listed, too", since="5.24")

TensorParallelLayer = lazy_part(_TENSOR_PARALLEL, "TensorParallelLayer", why="wrapper of a sharded layer")
ColwiseParallel = lazy_part(_TENSOR_PARALLEL, "ColwiseParallel", why="wrapper that is removed where it does nothing")
RowwiseParallel = lazy_part(_TENSOR_PARALLEL, "RowwiseParallel", why="wrapper whose all-reduce is replaced")
ReplicatedWithGradAllReduce = lazy_part(
    _TENSOR_PARALLEL, "ReplicatedWithGradAllReduce", why="wrapper that is removed: it is for gradients"
)
MoeExpertsParallel = lazy_part(_TENSOR_PARALLEL, "MoeExpertsParallel", why="wrapper whose all-reduce is replaced")
DistributedConfig = lazy_part("transformers.distributed", "DistributedConfig", why="tensor parallel targets in `bench`")


@uses("transformers.distributed.mixin", "_tp_size", why="tells a tensor parallel model")
@uses("transformers.distributed.mixin", "_device_mesh", why="the processes that run it")
def tensor_parallel_mesh(model: PreTrainedModel) -> DeviceMesh | None:
    """The devices over which `model` is sharded; None if it is not sharded."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    mesh = model._device_mesh
    return mesh if mesh.ndim == 1 else mesh["tp"]
