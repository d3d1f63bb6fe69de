//! The `larder` command, for the tests to start.

fn main() -> std::process::ExitCode {
    larder::main()
}
