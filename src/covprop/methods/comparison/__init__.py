"""What only compares: methods and approximations of others."""
