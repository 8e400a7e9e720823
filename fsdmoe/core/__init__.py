"""What every floor stands on: placements, boxes, errors, agreement between ranks, failures, a run's end."""
