"""The audit: how regular is the attention of a trained model."""

from regard.audits.gate import Gate
from regard.audits.places import sites
from regard.audits.report import Report
from regard.audits.run import Audit, audit, included_sentences

__all__ = ["Audit", "Gate", "Report", "audit", "included_sentences", "sites"]
