"""Checks the private parts of Tunix that `zenflow_jax.integrations.tunix` relies on."""

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

from zenflow_jax.integrations import tunix

ROOT = Path(__file__).parents[2]


def test_the_installed_version_is_the_extras_version():
    (bound,) = re.findall(
        r'^tunix = \["google-tunix>=([\d.]+),<', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert importlib.metadata.version("google-tunix") == bound
    assert bound == tunix.VERSION
    assert f"google-tunix {bound}" in (ROOT / "docs/trainers.md").read_text()


def test_another_version_is_rejected_by_name(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.8")
    with pytest.raises(ImportError, match=r"google-tunix is 0\.1\.8, .* need 0\.1\.7"):
        importlib.reload(tunix)
