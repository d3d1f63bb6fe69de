use larder_core::*;
use larder_store::*;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args[1] == "verify" {
        let t = Instant::now();
        let r = verify(args[2].as_ref(), &()).unwrap();
        println!(
            "verify {} files {:.2} GB/s problems {:?} unknown {:?}",
            r.files,
            r.bytes as f64 / 1e9 / t.elapsed().as_secs_f64(),
            r.problems,
            r.unknown
        );
        return;
    }
    let source = open_source(args[1].as_ref()).unwrap();
    let c: Vec<usize> = args[4].split(',').map(|v| v.parse().unwrap()).collect();
    let blueprint = Blueprint {
        model_type: "olmoe".into(),
        geometry: Geometry {
            layers: c[0],
            moe_layers: (0..c[0]).map(|l| LayerIdx(l as u16)).collect(),
            experts: c[1],
            top_k: 2,
            hidden: c[2],
            inter: c[3],
            bias: false,
        },
        experts: ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj"),
        resident: vec![TensorSpec { name: "model.embed_tokens.weight".into(), shape: vec![c[4], c[2]], product: true }],
        vocab: c[4],
        context: 16,
    };
    let kind = (args[3] != "keep").then(|| args[3].parse().unwrap());
    let r =
        convert(source.as_ref(), &blueprint, args[2].as_ref(), &ConvertOptions { experts: kind, resident: None }, &())
            .unwrap();
    let s = r.took.as_secs_f64();
    let hwm = std::fs::read_to_string("/proc/self/status").unwrap();
    let hwm = hwm.lines().find(|l| l.starts_with("VmHWM")).unwrap().to_owned();
    println!(
        "{kind:?}: {:.2} s, read {:.2} GB at {:.2} GB/s, wrote {:.2} GB at {:.2} GB/s, {hwm}",
        s,
        r.source_bytes as f64 / 1e9,
        r.source_bytes as f64 / 1e9 / s,
        r.store_bytes as f64 / 1e9,
        r.store_bytes as f64 / 1e9 / s
    );
}
