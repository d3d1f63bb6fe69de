use larder_core::Kind;
fn main() {
    let v: Vec<f32> = (0..1 << 20).map(|i| ((i * 7919) % 10007) as f32 * 1e-4 - 0.5).collect();
    let raw: Vec<u8> = v.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
    let mut w = v.clone();
    for kind in [Kind::F32, Kind::F16, Kind::Bf16, Kind::Q8_0, Kind::Q4_0] {
        let mut out = vec![0; kind.row_bytes(v.len()).unwrap()];
        let t = std::time::Instant::now();
        for _ in 0..100 {
            larder_store::narrow(kind, &v, &mut out).unwrap();
        }
        println!("narrow {kind}: {:.2} Gvalues/s", 0.1048576 / t.elapsed().as_secs_f64());
    }
    for kind in [Kind::F16, Kind::Bf16] {
        let t = std::time::Instant::now();
        for _ in 0..100 {
            larder_store::widen(kind, &raw, &mut w);
        }
        println!("widen {kind}: {:.2} Gvalues/s", 0.1048576 / t.elapsed().as_secs_f64());
    }
}
