"""The paper's tables and figures, as clients of covprop's public API."""
