//! Generates messages, client and server from `proto/experts.proto`, and its descriptor set for gRPC reflection.

#[cfg(feature = "workers")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use std::path::PathBuf;

    use protox::prost::Message;

    println!("cargo::rerun-if-changed=proto/experts.proto");
    let files = protox::Compiler::new(["proto"])?
        .include_source_info(true)
        .include_imports(true)
        .open_file("experts.proto")?
        .file_descriptor_set();
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("experts.bin"), files.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}

#[cfg(not(feature = "workers"))]
fn main() {}
