"""The audit: how regular is the attention of a trained model."""

from regard.audit.report import Report
from regard.audit.run import Audit, audit, included_sentences, sites

__all__ = ["Audit", "Report", "audit", "included_sentences", "sites"]
