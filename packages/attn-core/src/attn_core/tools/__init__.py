"""Tools of the command line besides selection: matrix, doctor, variables; torch-free."""
