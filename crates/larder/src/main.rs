//! The `larder` command.

fn main() -> std::process::ExitCode {
    larder_command::main()
}
