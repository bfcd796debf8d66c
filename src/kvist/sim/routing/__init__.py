"""Routing and admission judged on public traces: the production router in the simulator."""
