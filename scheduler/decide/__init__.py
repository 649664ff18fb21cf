"""Pure decisions over one frozen picture of the fleet. Nothing here awaits or asks a clock."""
