mod builder;
mod families;
mod hostile;
mod models;
mod parts;
mod tokens;
