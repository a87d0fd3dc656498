"""Fixtures of the tests of checkpoints."""

import huggingface_hub
import pytest
import transformers
from hub_server import Hub, serve

TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Hub:
    with serve() as hub:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + TEMPLATE)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)
        yield hub
