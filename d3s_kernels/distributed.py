"""What only several ranks need: kept rows evened out between them.

The selections themselves take ``process_group``.
"""

from ._ranks.rows import RowPlan, exchange_rows, plan_rows

__all__ = ["RowPlan", "exchange_rows", "plan_rows"]
