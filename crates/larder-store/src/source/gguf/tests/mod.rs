mod architectures;
mod builder;
mod hostile;
mod models;
mod parts;
mod tokens;
