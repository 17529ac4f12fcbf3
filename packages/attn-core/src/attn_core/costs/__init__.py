"""What passes cost: profiles of measured points, a model between them, a workload's mix."""
