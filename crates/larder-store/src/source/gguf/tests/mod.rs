mod builder;
mod families;
mod hostile;
mod models;
mod tokens;
