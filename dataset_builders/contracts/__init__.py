"""What is on disk between the packages: schemas, and the only functions that read and write them."""
