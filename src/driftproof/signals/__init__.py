"""What an agent that learned in a market says of others: BUY, HOLD or SELL, how sure it is, and what it expects."""

from driftproof.signals.batch import infer
from driftproof.signals.rows import Signals, Thresholds
from driftproof.signals.streaming import RunningFeatures, StreamReader, stream

__all__ = ["RunningFeatures", "Signals", "StreamReader", "Thresholds", "infer", "stream"]
