"""Export of agents to ONNX."""

from driftproof._requirements import require

require("driftproof.export", "onnx", "gymnasium", "stable_baselines3")

from driftproof.export.onnx_file import ExportError, export_onnx

__all__ = ["ExportError", "export_onnx"]
