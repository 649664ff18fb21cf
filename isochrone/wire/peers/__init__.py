"""Messages between the scheduler, agents and routers."""
