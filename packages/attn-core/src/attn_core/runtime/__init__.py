"""Running a selection: batch, layer, backend contract, dispatcher, graphs, warm-up."""
