//! The command `pinpool`. All that it does is in the library.

fn main() -> std::process::ExitCode {
    pinpool_cli::main(std::env::args_os()).into()
}
