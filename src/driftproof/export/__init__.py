"""Export of agents to ONNX."""

from driftproof.export.onnx_file import ExportError, export_onnx

__all__ = ["ExportError", "export_onnx"]
