mod builder;
mod hostile;
mod models;
mod tokens;
