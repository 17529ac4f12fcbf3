"""What the command line shows beside a selection: matrix, doctor, variables; torch-free."""
