"""The report of a run: one HTML file that needs nothing else."""

from polyreme.report.data import ReportData
from polyreme.report.page import build_report
from polyreme.report.write import REPORT_NAME, write_report

__all__ = ["REPORT_NAME", "ReportData", "build_report", "write_report"]
